"""Changes to the arguments that a module is called with."""
