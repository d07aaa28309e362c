"""The transformer: embeddings, blocks, the order of the pixels, and the recurrent state."""
