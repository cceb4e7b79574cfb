"""Where a module computes 1 + tanh: in its code, and in a probe run."""
