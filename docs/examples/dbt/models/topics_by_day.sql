{{ config(materialized='table') }}

select
    cast(window_start as date) as day,
    item as topic,
    count(*) as minutes,
    sum("count") as rsvps,
    sum(error) as at_most_too_many
from {{ source('gold', 'top_topics') }}
group by all
