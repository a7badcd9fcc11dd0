SELECT
  window.start AS window_start,
  window.end AS window_end,
  impressions.campaign AS campaign,
  count(*) AS impressions,
  count(clicks.click_id) AS clicks
FROM joined
GROUP BY window(impressions.event_time, '1 minute'), impressions.campaign
