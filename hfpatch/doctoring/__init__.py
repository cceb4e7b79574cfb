"""The whole loop as one call: facts, hazards, room, plan, proof, and which way to run a model here."""
