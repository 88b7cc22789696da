"""How processes are started: one file a launcher; the listing of this folder is the list of launchers."""
