"""Every architecture of transformers, from its default config."""
