"""Reasons not to patch: torch.compile has compiled code of the model, or the model has changed since the plan."""
