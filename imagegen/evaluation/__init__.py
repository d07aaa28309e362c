"""What a trained model is worth: bits/dim, compression, and the checks of `imagegen verify`."""
