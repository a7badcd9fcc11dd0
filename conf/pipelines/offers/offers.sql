SELECT merchant, offer, version, title, price, currency, category,
  coalesce(available, false) AS available, coalesce(deleted, false) AS deleted, url, event_time AS updated_at
FROM offers
