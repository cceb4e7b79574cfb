"""Kinds of change by which weights get other values that follow from the old ones, without a copy of these."""
