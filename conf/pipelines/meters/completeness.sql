SELECT
  customer,
  sum(readings) AS readings,
  max(last_seq) - min(first_seq) + 1 - sum(readings) AS missing,
  max(window_end) AS through
FROM hourly_load
GROUP BY customer
