"""Model architectures as plain torch: weights in, `forward(input_ids, positions, inputs)` out."""
