-- Edits and new pages; the test events that Wikimedia sends through (canaries) are no edits.
-- The language is that of the host; wikis of no language (Wikidata, Commons) have an empty one.
SELECT
  window.start AS window_start,
  window.end AS window_end,
  wiki,
  regexp_extract(server_name, '^([a-z-]+)[.](wiki(pedia|books|news|quote|source|versity|voyage)|wiktionary)[.]', 1)
    AS language,
  count(*) AS edits,
  count_if(bot) AS by_bots,
  sum(coalesce(length.new, 0) - coalesce(length.old, 0)) AS bytes
FROM edits
WHERE type IN ('edit', 'new') AND coalesce(meta.domain, '') <> 'canary'
GROUP BY
  window(event_time, '1 minute'),
  wiki,
  regexp_extract(server_name, '^([a-z-]+)[.](wiki(pedia|books|news|quote|source|versity|voyage)|wiktionary)[.]', 1)
