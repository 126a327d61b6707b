"""What a run costs in seconds and dollars, before and after."""
