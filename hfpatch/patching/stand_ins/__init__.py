"""Trial runs of copies of modules, made while a plan is made; the model itself does not run."""
