"""What the harness needs to know of the gradients of the experts."""
