"""Who may connect: keys, tickets, origins, limits; and what a principal may see."""
