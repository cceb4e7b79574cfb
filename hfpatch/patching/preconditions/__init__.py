"""Reasons not to write: code that torch.compile has made already, a model that changed since a plan was made."""
