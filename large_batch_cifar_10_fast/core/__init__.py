"""What the programs are made of. Nothing here imports a program, `images` or `lab`."""
