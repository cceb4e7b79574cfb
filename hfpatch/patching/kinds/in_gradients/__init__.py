"""Changes to the graph of gradients alone: the values of a forward stay as they are."""
