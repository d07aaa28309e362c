"""Drawing and completing images from the recurrent state, and the folders they are written to."""
