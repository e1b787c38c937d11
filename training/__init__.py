"""Models of our own, trained here. Not part of the installed package."""
