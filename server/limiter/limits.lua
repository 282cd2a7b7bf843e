-- All limits of one request in one step: what `states.py` and `bucket.py` do, on Redis' own clock.
--
-- KEYS  1: when this epoch was born, 2...: the states, one per limit
-- ARGV  1: command   2: now_ms, empty for Redis' clock   3: request_id   4: lease_ms
--       5: carry_ms   6: seats carried from earlier epochs, JSON {index: {{id, lease_ms}...}}
--       7...: of each limit: kind ("seats" or "rate"), amount, units
--
-- Answers {"lost"}: this epoch is not known here.   {"carry", index...}: which seats to send along.
--         {"ok", age_ms, {wait_ms...}, {remaining...}, {reset_ms...}, {holders...}}
-- State of a rate: {amount, backlog, at, {{id, charged, low, expires}...}}; of seats: {at, {{id, expires}...}}
local WINDOW_MS = 60000
local KEPT_MS = 604800000 -- An epoch that nobody used for a week is as good as lost.

local command, request_id = ARGV[1], ARGV[3]
local lease_ms, carry_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
local clock_ms = tonumber(ARGV[2])
if not clock_ms then
  local time = redis.call('TIME')
  clock_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

local born_ms = tonumber(redis.call('GET', KEYS[1]))
if not born_ms then return {'lost'} end
if born_ms == 0 then
  born_ms = clock_ms
  redis.call('SET', KEYS[1], string.format('%.0f', born_ms))
end

local function backlog_at(bucket, now)
  return math.max(0, bucket[2] - bucket[1] * math.max(0, now - bucket[3]))
end

local rate = {}

function rate.new(amount) return {amount, amount * WINDOW_MS, born_ms, {}} end

function rate.touch(bucket, amount, now)
  local backlog = backlog_at(bucket, now)
  now = math.max(now, bucket[3])
  bucket[1], bucket[2], bucket[3] = amount, backlog, now
  local open = {}
  for _, charge in ipairs(bucket[4]) do
    if charge[4] > now then
      charge[3] = math.min(charge[3], backlog)
      open[#open + 1] = charge
    end
  end
  bucket[4] = open
end

function rate.wait_ms(bucket, amount, units, now)
  if amount <= 0 then return WINDOW_MS end
  local missing = backlog_at(bucket, now) + (math.min(units, amount) - amount) * WINDOW_MS
  return math.max(0, math.ceil(missing / amount))
end

function rate.charge(bucket, units)
  local charged = math.min(units, bucket[1]) * WINDOW_MS
  bucket[2] = bucket[2] + charged
  table.insert(bucket[4], {request_id, charged, bucket[2], bucket[3] + lease_ms})
end

function rate.settle(bucket, used, now)
  rate.touch(bucket, bucket[1], now)
  local charges = bucket[4]
  local index
  for i, charge in ipairs(charges) do
    if charge[1] == request_id then index = i end
  end
  if not index then return end
  local charge = charges[index]
  local unused = charge[2] - used * WINDOW_MS
  if unused < 0 then
    bucket[2] = bucket[2] - unused
  else
    local refund = math.min(unused, charge[3])
    bucket[2] = bucket[2] - refund
    for i, other in ipairs(charges) do
      if i < index then
        other[3] = math.min(other[3], charge[3] - refund)
      elseif i > index then
        other[3] = other[3] - refund
      end
    end
  end
  table.remove(charges, index)
end

function rate.standing(bucket, amount, now)
  local backlog = backlog_at(bucket, now)
  now = math.max(now, bucket[3])
  local holders = {}
  for _, charge in ipairs(bucket[4]) do
    if charge[4] > now then
      holders[#holders + 1] = {charge[1], charge[2] / WINDOW_MS, charge[4] - now}
    end
  end
  local reset_ms = WINDOW_MS
  if amount > 0 then reset_ms = math.ceil(backlog / amount) end
  return math.max(0, amount - math.ceil(backlog / WINDOW_MS)), reset_ms, holders
end

function rate.life_ms(bucket)
  local life_ms = WINDOW_MS
  if bucket[1] > 0 then life_ms = math.max(life_ms, math.ceil(bucket[2] / bucket[1])) end
  for _, charge in ipairs(bucket[4]) do life_ms = math.max(life_ms, charge[4] - bucket[3]) end
  return life_ms
end

local seats = {}

local function taken_at(state, now)
  local taken = {}
  for _, lease in ipairs(state[2]) do
    if lease[2] > math.max(now, state[1]) then taken[#taken + 1] = lease end
  end
  return taken
end

function seats.new() return {born_ms, {}} end

function seats.touch(state, _, now)
  state[1] = math.max(now, state[1])
  state[2] = taken_at(state, now)
end

function seats.wait_ms(state, amount, _, now)
  if amount <= 0 then return WINDOW_MS end
  now = math.max(now, state[1])
  local ends = {}
  for _, lease in ipairs(taken_at(state, now)) do ends[#ends + 1] = lease[2] end
  table.sort(ends)
  local missing = #ends + 1 - amount
  if missing <= 0 then return 0 end
  return ends[missing] - now
end

function seats.charge(state) table.insert(state[2], {request_id, state[1] + lease_ms}) end

function seats.settle(state, _, now)
  seats.touch(state, 0, now)
  for i, lease in ipairs(state[2]) do
    if lease[1] == request_id then
      table.remove(state[2], i)
      return
    end
  end
end

function seats.standing(state, amount, now)
  now = math.max(now, state[1])
  local holders, reset_ms = {}, 0
  for _, lease in ipairs(taken_at(state, now)) do
    local left_ms = lease[2] - now
    if #holders == 0 or left_ms < reset_ms then reset_ms = left_ms end
    holders[#holders + 1] = {lease[1], 1, left_ms}
  end
  return math.max(0, amount - #holders), reset_ms, holders
end

function seats.life_ms(state)
  -- Not forgotten while seats of an earlier epoch would have to be carried again.
  local life_ms = math.max(WINDOW_MS, carry_ms)
  for _, lease in ipairs(state[2]) do life_ms = math.max(life_ms, lease[2] - state[1]) end
  return life_ms
end

local kinds = {rate = rate, seats = seats}
local limits, missing = {}, {}
for i = 2, #KEYS do
  local at = 7 + (i - 2) * 3
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
if command == 'settle' then
  for _, limit in ipairs(limits) do
    if limit.is_known then
      limit.kind.settle(limit.state, limit.units, clock_ms)
      save(limit)
    end
  end
elseif command == 'check' then
  for i, limit in ipairs(limits) do
    waits[i] = limit.kind.wait_ms(limit.state, limit.amount, limit.units, clock_ms)
  end
elseif command == 'acquire' then
  local carried = ARGV[6] ~= '' and cjson.decode(ARGV[6]) or {}
  for i, limit in ipairs(limits) do
    if limit.kind == seats and not limit.is_known and clock_ms < born_ms + carry_ms then
      local leases = carried[tostring(i)]
      if leases then
        for _, lease in ipairs(leases) do
          table.insert(limit.state[2], {lease[1], clock_ms + lease[2]})
        end
      else
        missing[#missing + 1] = i
      end
    end
  end
  if #missing > 0 then return {'carry', unpack(missing)} end
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
  redis.call('PEXPIRE', KEYS[1], KEPT_MS)
end

local remaining, resets, holders = {}, {}, {}
for i, limit in ipairs(limits) do
  remaining[i], resets[i], holders[i] = limit.kind.standing(limit.state, limit.amount, clock_ms)
  if command ~= 'standings' then holders[i] = {} end
end
return {'ok', math.max(0, clock_ms - born_ms), waits, remaining, resets, holders}
