"""From records and claims to verdicts: claims, statistics and staleness."""
