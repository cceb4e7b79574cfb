"""Kinds of change by which a module computes, or keeps what it is given, in float32."""
