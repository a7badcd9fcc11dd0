"""Who may come in: keys, tickets, origins, limits. What a principal then sees is the hub's business."""
