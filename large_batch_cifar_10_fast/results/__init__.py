"""What campaigns leave behind: writing it, reading it, and what may be concluded from it."""
