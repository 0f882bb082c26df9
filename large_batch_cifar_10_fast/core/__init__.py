"""What the programs share. Nothing here imports a program, but that of the name in --recipe."""
