"""Records of runs and the folders that hold them."""
