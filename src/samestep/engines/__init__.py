"""One file an engine; the listing of this folder is the list of engines. They never import each other."""
