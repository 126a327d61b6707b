"""Exit codes of ``flashmoe``; docs/reference/cli.md explains them."""

HOLDS, REFUTED, USAGE, GATE_FAILED, INCONCLUSIVE = range(5)
BUG = 70  # EX_SOFTWARE of sysexits.h: never mistaken for a verdict
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
