"""Pure functions of tensors: initial values and what else has numbers in it. Knows no model."""
