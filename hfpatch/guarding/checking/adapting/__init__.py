"""Hazards of adapters: halves that cannot learn, evaluation that leaves them out, ties that they break."""
