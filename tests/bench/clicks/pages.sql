SELECT received_at, page
FROM views
