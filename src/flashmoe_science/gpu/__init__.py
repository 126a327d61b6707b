"""Facts about GPUs, and how a kernel is compiled and launched."""
