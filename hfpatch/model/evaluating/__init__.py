"""What evaluation computes other than training, so that an adapter in it counts in training only."""
