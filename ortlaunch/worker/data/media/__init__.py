"""Files of images and recordings: their folders, and the samples made of them."""
