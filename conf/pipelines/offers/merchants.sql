SELECT merchant, count(*) AS versions, max(updated_at) AS newest
FROM offers
GROUP BY merchant
