"""What runs in workers: correctness, launches, rounds of times, and the machine."""
