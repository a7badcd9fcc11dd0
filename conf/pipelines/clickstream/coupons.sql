SELECT visitor, session_start, substring(last_removed, 16) AS sku
FROM visits
WHERE NOT closed AND removed > 0 AND bought = 0
