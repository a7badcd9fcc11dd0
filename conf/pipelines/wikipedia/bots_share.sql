SELECT window_start, sum(edits) AS edits, round(sum(by_bots) / sum(edits), 4) AS share
FROM edits_by_wiki
GROUP BY window_start
