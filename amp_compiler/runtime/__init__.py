"""What runs at training time: loss scale, update kernels."""
