"""The building blocks of the programs. Nothing here imports a program, `images` or `lab`."""
