SELECT
  window.start AS window_start,
  window.end AS window_end,
  `group`.group_city AS city,
  `group`.group_country AS country,
  count_if(response = 'yes') AS yes,
  count_if(response = 'no') AS no,
  sum(coalesce(guests, 0)) AS guests
FROM rsvps
GROUP BY window(event_time, '30 seconds'), `group`.group_city, `group`.group_country
