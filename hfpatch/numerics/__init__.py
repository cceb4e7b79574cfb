"""Functions of tensors and nn modules: initial values, statistics, losses, attention, modulation."""
