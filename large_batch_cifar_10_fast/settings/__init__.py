"""What every part may need to know of a request: settings, how an option is declared, how one is refused."""
