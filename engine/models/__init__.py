"""The models as plain torch: weights in, `forward(input_ids, positions, inputs)` out."""
