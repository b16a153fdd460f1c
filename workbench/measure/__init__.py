"""How long it takes, what it must do at least, and what this device can do."""
