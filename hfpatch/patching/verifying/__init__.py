"""Cases, and this model on this batch, against float32."""
