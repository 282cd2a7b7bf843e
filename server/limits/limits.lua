-- All limits of one request in one step, as in `states.py` and `bucket.py`, but on Redis' own clock.
--
-- KEYS  1: since when Redis counts   2...: the states, one per limit; for `beat` the gateways, by their last beats
-- ARGV  1: command   2: now_ms, empty for Redis' clock   3: request_id or gateway_id   4: lifetime_ms
--       5: 1 if Redis has answered this gateway before
--       6...: for each limit its kind ("seats" or "rate"), amount, units
--
-- Answers {age_ms, {wait_ms...}, {remaining...}, {reset_ms...}, {holders...}}; to `beat` {age_ms, {gateway_id...}}.
-- State of a rate: {amount, backlog, at, ids, charged, lows, ends}, of seats: {at, ids, ends}; oldest first.
-- Charges are in columns: with a table for each, a call took four times as long at 100 open charges.
local WINDOW_MS = 60000

local command, request_id = ARGV[1], ARGV[3]
local lifetime_ms = tonumber(ARGV[4])
local clock_ms = tonumber(ARGV[2])
if not clock_ms then
  local time = redis.call('TIME')
  clock_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

local born_ms = tonumber(redis.call('GET', KEYS[1]))
if not born_ms then
  -- A gateway that knows Redis tells that the counts are lost. Without one, nothing was counted yet.
  born_ms = ARGV[5] == '1' and clock_ms or 1
  if command == 'acquire' or command == 'beat' then
    redis.call('SET', KEYS[1], string.format('%.0f', born_ms))
  end
end
local age_ms = math.max(0, clock_ms - born_ms)

if command == 'beat' then
  redis.call('ZADD', KEYS[2], clock_ms, request_id)
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', clock_ms - lifetime_ms)
  return {age_ms, redis.call('ZRANGE', KEYS[2], 0, -1)}
end

local function backlog_at(bucket, now)
  return math.max(0, bucket[2] - bucket[1] * math.max(0, now - bucket[3]))
end

local rate = {}

function rate.new(amount) return {amount, amount * WINDOW_MS, born_ms, {}, {}, {}, {}} end

local function drop(columns, first, index)
  for column = first, #columns do table.remove(columns[column], index) end
end

local function drop_expired(columns, first, now)
  local ends = columns[#columns]
  for index = #ends, 1, -1 do
    if ends[index] <= now then drop(columns, first, index) end
  end
end

local function find(ids)
  for index = 1, #ids do
    if ids[index] == request_id then return index end
  end
end

function rate.touch(bucket, amount, now)
  local backlog, lows = backlog_at(bucket, now), bucket[6]
  bucket[1], bucket[2], bucket[3] = amount, backlog, math.max(now, bucket[3])
  for index = #lows, 1, -1 do
    if lows[index] <= backlog then break end
    lows[index] = backlog
  end
  drop_expired(bucket, 4, bucket[3])
end

function rate.wait_ms(bucket, amount, units, now)
  if amount <= 0 then return WINDOW_MS end
  local missing = backlog_at(bucket, now) + (math.min(units, amount) - amount) * WINDOW_MS
  return math.max(0, math.ceil(missing / amount))
end

function rate.charge(bucket, units)
  local charged = math.min(units, bucket[1]) * WINDOW_MS
  bucket[2] = bucket[2] + charged
  local new = {request_id, charged, bucket[2], bucket[3] + lifetime_ms}
  for column = 1, 4 do table.insert(bucket[3 + column], new[column]) end
end

function rate.release(bucket, used, now)
  rate.touch(bucket, bucket[1], now)
  local index, lows = find(bucket[4]), bucket[6]
  if not index then return end
  local unused = bucket[5][index] - used * WINDOW_MS
  if unused < 0 then
    bucket[2] = bucket[2] - unused
  else
    local refund = math.min(unused, lows[index])
    bucket[2] = bucket[2] - refund
    for older = 1, index - 1 do lows[older] = math.min(lows[older], lows[index] - refund) end
    for newer = index + 1, #lows do lows[newer] = lows[newer] - refund end
  end
  drop(bucket, 4, index)
end

local function holders_at(ids, charged, ends, now)
  local holders = {}
  for index = 1, #ids do
    if ends[index] > now then
      local units = charged and charged[index] / WINDOW_MS or 1
      holders[#holders + 1] = {ids[index], units, ends[index] - now}
    end
  end
  return holders
end

function rate.standing(bucket, amount, now)
  local backlog, reset_ms = backlog_at(bucket, now), WINDOW_MS
  if amount > 0 then reset_ms = math.ceil(backlog / amount) end
  return math.max(0, amount - math.ceil(backlog / WINDOW_MS)), reset_ms
end

function rate.holders(bucket, now)
  return holders_at(bucket[4], bucket[5], bucket[7], math.max(now, bucket[3]))
end

function rate.life_ms(bucket)
  local life_ms = WINDOW_MS
  if bucket[1] > 0 then life_ms = math.max(life_ms, math.ceil(bucket[2] / bucket[1])) end
  for _, ends in ipairs(bucket[7]) do life_ms = math.max(life_ms, ends - bucket[3]) end
  return life_ms
end

local seats = {}

function seats.new() return {born_ms, {}, {}} end

function seats.touch(state, _, now)
  state[1] = math.max(now, state[1])
  drop_expired(state, 2, state[1])
end

-- The number of taken seats, and when the first of them ends.
local function taken_at(state, now)
  local taken, first_end = 0, nil
  for _, ends in ipairs(state[3]) do
    if ends > now then
      taken = taken + 1
      if not first_end or ends < first_end then first_end = ends end
    end
  end
  return taken, first_end
end

function seats.wait_ms(state, amount, _, now)
  if amount <= 0 then return WINDOW_MS end
  now = math.max(now, state[1])
  local missing = taken_at(state, now) + 1 - amount
  if missing <= 0 then return 0 end
  local taken = {}
  for _, ends in ipairs(state[3]) do
    if ends > now then taken[#taken + 1] = ends end
  end
  table.sort(taken)
  return taken[missing] - now
end

function seats.charge(state)
  table.insert(state[2], request_id)
  table.insert(state[3], state[1] + lifetime_ms)
end

function seats.release(state, _, now)
  seats.touch(state, 0, now)
  local index = find(state[2])
  if index then drop(state, 2, index) end
end

function seats.standing(state, amount, now)
  now = math.max(now, state[1])
  local taken, first_end = taken_at(state, now)
  return math.max(0, amount - taken), (first_end or now) - now
end

function seats.holders(state, now)
  return holders_at(state[2], nil, state[3], math.max(now, state[1]))
end

function seats.life_ms(state)
  local life_ms = WINDOW_MS
  for _, ends in ipairs(state[3]) do life_ms = math.max(life_ms, ends - state[1]) end
  return life_ms
end

local kinds = {rate = rate, seats = seats}
local limits = {}
for i = 2, #KEYS do
  local at = 6 + (i - 2) * 3
  local limit = {
    key = KEYS[i], kind = kinds[ARGV[at]], amount = tonumber(ARGV[at + 1]),
    units = tonumber(ARGV[at + 2])
  }
  local packed = redis.call('GET', limit.key)
  limit.is_known = packed ~= false
  limit.state = packed and cmsgpack.unpack(packed) or limit.kind.new(limit.amount)
  limits[#limits + 1] = limit
end

local function save(limit)
  local life_ms = string.format('%.0f', limit.kind.life_ms(limit.state) + 1000)
  redis.call('SET', limit.key, cmsgpack.pack(limit.state), 'PX', life_ms)
end

local waits = {}
if command == 'release' then
  for _, limit in ipairs(limits) do
    if limit.is_known then
      limit.kind.release(limit.state, limit.units, clock_ms)
      save(limit)
    end
  end
elseif command == 'check' then
  for i, limit in ipairs(limits) do
    waits[i] = limit.kind.wait_ms(limit.state, limit.amount, limit.units, clock_ms)
  end
elseif command == 'acquire' then
  local is_refused = false
  for i, limit in ipairs(limits) do
    limit.kind.touch(limit.state, limit.amount, clock_ms)
    waits[i] = limit.kind.wait_ms(limit.state, limit.amount, limit.units, clock_ms)
    is_refused = is_refused or waits[i] > 0
  end
  for _, limit in ipairs(limits) do
    if not is_refused then limit.kind.charge(limit.state, limit.units) end
    save(limit)
  end
end

local remaining, resets, holders = {}, {}, {}
for i, limit in ipairs(limits) do
  remaining[i], resets[i] = limit.kind.standing(limit.state, limit.amount, clock_ms)
  holders[i] = command == 'standings' and limit.kind.holders(limit.state, clock_ms) or {}
end
return {age_ms, waits, remaining, resets, holders}
