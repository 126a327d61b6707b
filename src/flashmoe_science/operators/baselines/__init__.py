"""How other implementations of our operators are called: one file for each operator, or for each library."""
