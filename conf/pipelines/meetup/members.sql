SELECT received_at, member.member_id AS member_id
FROM rsvps
