"""One file for each kind of memory a layer can have; no torch here."""
