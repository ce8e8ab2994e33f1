//! The loop: one thread that looks at what processes have done and what links bring, and sleeps when nothing has happened for a while.
//!
//! Nothing in it waits for a process or another relay. A connection whose two ends have asked (`wishes`, and `finds` of other relays)
//! becomes a [`Carried`]; links are met in threads of their own, which hand them over.

use crate::Error;
use crate::calls::{self, Event, Meetings, Post};
use crate::carried::{Carried, Failed, Pumped};
use crate::closing::{self, Closing};
use crate::ends::{End, Way};
use crate::link::{Link, Message, lies};
use crate::local::{self, About, Door, Said};
use crate::meet::{Host, Peers};
use rustix::event::epoll;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use thruway_auth::KeyPair;
use thruway_fabric::Provider;
use thruway_sockets::board::{Board, Circle, Key};
use thruway_sockets::meeting::Request;
use thruway_sockets::{Over, RING_MIN, Segment};

/// What a relay is set up with.
#[derive(Clone)]
pub struct Config {
    /// The port at which other relays reach this one, and this one them.
    pub port: u16,
    /// The addresses to listen at; every one of this host's if there is none.
    pub listen: Vec<IpAddr>,
    /// What carries links.
    pub provider: Provider,
    /// This relay's own key.
    pub keys: KeyPair,
    /// The keys of others.
    pub peers: Peers,
    /// Seal what is sent. Without, it is sealed where the other relay wants that.
    pub encrypt: bool,
    /// Bytes of a ring, a power of two.
    pub ring: usize,
    /// The directory of boards.
    pub board: PathBuf,
    /// How long to look again and again before sleeping.
    pub spin: Duration,
    /// End when no process of this host has used it for so long.
    pub until_unused: Option<Duration>,
}

/// Relays that are called at a time.
const CALLS_MAX: usize = 32;
/// Links with one address: two, if both have called, and others that are about to end.
const LINKS_OF_ONE_MAX: usize = 8;
/// Connections that other relays look for and no process here has asked for yet, of each link.
const FINDS_MAX: usize = 4096;
/// How long such a search, or a process's wish, is kept.
const PATIENCE: Duration = Duration::from_secs(60);
/// After a link could not be made.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// An idle link is tried so often.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Descriptors of a connection: TCP, waker and room. They are reserved before a process is offered a segment.
const DESCRIPTORS_OF_ONE: usize = 3;
/// Upper bound of the descriptors of a link.
const DESCRIPTORS_OF_LINK: usize = 4;
/// Descriptors that are kept free for new processes.
const DESCRIPTORS_SPARE: usize = 8;
/// Interval of log messages about the limit of open files.
const WARN_EVERY: Duration = Duration::from_secs(10);
/// Messages of a link at a time.
const TURN: usize = 16;

/// Most messages of one process, and most new processes, that are handled before other work.
const LOCAL_TURN: usize = 64;
/// How long there is nothing to do before what is not urgent is said.
const LAZY: Duration = Duration::from_micros(30);
/// How long that waits where there is always something to do.
const LATE: Duration = Duration::from_millis(1);
/// Looks between two at what processes say: wake-ups are for who sleeps.
const LOCAL_EVERY: u32 = 64;

/// A relay that other hosts and processes can reach.
pub struct Relay {
    config: Config,
    host: Arc<Host>,
    door: Door,
    listeners: Vec<TcpListener>,
    board: Board,
}

impl Relay {
    /// Opens the device, and what others reach it by.
    ///
    /// # Errors
    /// [`Error::Taken`], or what cannot be opened.
    pub fn open(config: Config) -> Result<Relay, Error> {
        // Three for each connection that is carried.
        let limit = rustix::process::getrlimit(Resource::Nofile);
        let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let door = Door::open(config.port)?;
        config.peers.all()?;
        let listen = |at: IpAddr| {
            let listener = TcpListener::bind((at, config.port));
            let address = SocketAddr::new(at, config.port);
            listener.map_err(|error| match error.kind() {
                std::io::ErrorKind::AddrInUse => Error::InUse(address),
                _ => Error::io(format!("cannot listen at {address}"))(error),
            })
        };
        let listeners = match &config.listen[..] {
            [] => vec![listen(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| listen(Ipv4Addr::UNSPECIFIED.into()))?],
            some => some.iter().map(|at| listen(*at)).collect::<Result<_, _>>()?,
        };
        let uid = rustix::process::geteuid().as_raw();
        let board = Board::open(&config.board, Circle::User(uid)).map_err(Error::io("no board"))?;
        let data_port = config.port.checked_add(1).unwrap_or(0);
        let (keys, peers) = (config.keys.clone(), config.peers.clone());
        let host = Host::new(config.provider.clone(), keys, peers, config.encrypt, data_port)?;
        // What is found by processes works.
        door.listen()?;
        Ok(Relay { config, host: Arc::new(host), door, listeners, board })
    }

    /// Carries connections. Returns if that cannot go on, or when the relay is not used any more.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn run(self) -> Result<(), Error> {
        let failed = || Error::io("no relay");
        let (post, events) = Post::new()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| failed()(error.into()))?;
        let watch = |fd: BorrowedFd<'_>, token: u64| {
            let added = epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
            added.map_err(|error| failed()(error.into()))
        };
        watch(post.bell(), BELL)?;
        watch(self.door.0.as_fd(), DOOR)?;
        watch(self.host.context.wait_fd(), DEVICE)?;
        let descriptors = descriptors();
        let meetings = Arc::new(Meetings::new(descriptors));
        for listener in self.listeners {
            let (host, post, meetings) = (Arc::clone(&self.host), post.clone(), Arc::clone(&meetings));
            std::thread::spawn(move || calls::answer_all(&host, &listener, &post, &meetings));
        }
        tracing::info!(port = self.config.port, provider = self.host.provider(), key = %self.config.keys.public(), "relay");
        let about = About {
            provider: self.host.provider().to_owned(),
            device: match &self.config.provider {
                Provider::Verbs(config) => config.device.clone().unwrap_or_default(),
                _ => String::new(),
            },
            key: self.config.keys.public().to_string(),
            peers: std::path::absolute(self.config.peers.path()).unwrap_or_default().display().to_string(),
            encrypts: self.config.encrypt,
        };
        let mut state = State {
            host: self.host,
            config: self.config,
            board: self.board,
            door: self.door,
            about,
            post,
            epoll,
            next: 1,
            clients: HashMap::new(),
            links: HashMap::new(),
            ways: HashMap::new(),
            wishes: HashMap::new(),
            asked: HashMap::new(),
            finds: HashMap::new(),
            carried: HashMap::new(),
            by_end: HashMap::new(),
            closing: Closing::default(),
            first: 0,
            reserve: reserve(),
            descriptors: descriptors.saturating_sub(meetings.most() * DESCRIPTORS_OF_LINK),
            warned: HashMap::new(),
        };
        state.run(&events)
    }
}

/// In the epoll set: what is no process and no link.
const BELL: u64 = 0;
const DOOR: u64 = 1;
const DEVICE: u64 = 2;
/// Where the numbers of processes and links begin.
const NUMBERS: u64 = 3;

/// How far it is known.
enum WayState {
    Calling,
    Link(u64),
    Failed(Instant),
}

/// A process that has asked for a segment.
struct Wish {
    client: u64,
    key: [u8; 48],
    service: u64,
    since: Instant,
}

/// What another relay looks for.
struct Find {
    link: u64,
    /// The connection's number there.
    id: u32,
    ring: u32,
    since: Instant,
}

struct State {
    host: Arc<Host>,
    config: Config,
    board: Board,
    door: Door,
    about: About,
    post: Post,
    epoll: OwnedFd,
    /// The next number, of anything.
    next: u32,
    clients: HashMap<u64, OwnedFd>,
    links: HashMap<u64, Link>,
    ways: HashMap<Way, WayState>,
    wishes: HashMap<End, Wish>,
    /// Wishes that another relay was asked for, by their numbers.
    asked: HashMap<u32, (End, u64)>,
    /// What other relays look for.
    finds: HashMap<End, Find>,
    carried: HashMap<u32, Carried>,
    by_end: HashMap<End, u32>,
    closing: Closing,
    /// Position in `carried` at which the next turn begins.
    first: usize,
    /// Limit of descriptors for processes, links and connections.
    descriptors: usize,
    /// A reserved descriptor, with which processes are refused at the limit.
    reserve: Option<OwnedFd>,
    /// Times of the last log messages about the limit of open files, by effect.
    warned: HashMap<&'static str, Instant>,
}

fn reserve() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").map(OwnedFd::from).ok()
}

fn end_of(request: &Request) -> End {
    End { addresses: *Key::addresses(&request.key), is_higher: request.is_higher }
}

/// Number of files that this process may open.
fn descriptors() -> usize {
    let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(open + DESCRIPTORS_SPARE)
}

impl State {
    fn run(&mut self, events: &Receiver<Event>) -> Result<(), Error> {
        // Since when there is nothing to do.
        let (mut looks, mut idle) = (0u32, None);
        // When what is not urgent was last said.
        let mut told = Instant::now();
        let (mut used, mut pinged, mut cleaned) = (Instant::now(), Instant::now(), Instant::now());
        let mut housekeep = |state: &mut State, now: Instant| {
            if now - pinged > PING_INTERVAL {
                pinged = now;
                state.ping();
            }
            if now - cleaned > Duration::from_secs(1) {
                cleaned = now;
                state.clean(now);
            }
        };
        loop {
            looks = looks.wrapping_add(1);
            self.host.context.poll();
            let now = Instant::now();
            let is_late = now - told >= LATE;
            let mut did = self.hear_links() | self.pump(is_late);
            told = if is_late { now } else { told };
            if looks.is_multiple_of(LOCAL_EVERY) {
                did |= self.hear_local(Duration::ZERO)?;
                // Also where there is never nothing to do.
                housekeep(self, now);
                self.closing.look(now);
                while let Ok(event) = events.try_recv() {
                    self.take(event);
                }
            }
            if did {
                idle = None;
                continue;
            }
            // Nothing is urgent: what others may want to know later. An answer that comes before saves a message.
            let since = now - *idle.get_or_insert(now);
            self.closing.look(now);
            if since >= LAZY {
                told = now;
                if self.pump(true) {
                    continue;
                }
            }
            if since < self.config.spin {
                std::thread::yield_now();
                continue;
            }
            if !self.clients.is_empty() || !self.carried.is_empty() {
                used = now;
            }
            if self.config.until_unused.is_some_and(|limit| now - used > limit) {
                return Ok(());
            }
            housekeep(self, now);
            self.carried.values().for_each(|one| one.segment.set_asleep(true));
            let is_quiet = self.host.context.arm();
            // What was done before this was said.
            let did = !is_quiet | self.hear_links() | self.pump(true);
            let time = match (did, self.config.until_unused) {
                (true, _) => Duration::ZERO,
                (false, _) if !self.closing.is_empty() => closing::INTERVAL,
                (false, Some(limit)) if self.clients.is_empty() && self.carried.is_empty() => limit / 4,
                (false, _) => Duration::from_secs(1),
            };
            self.hear_local(time)?;
            self.carried.values().for_each(|one| one.segment.set_asleep(false));
            told = Instant::now();
            while let Ok(event) = events.try_recv() {
                self.take(event);
            }
            idle = None;
        }
    }

    fn number(&mut self) -> u32 {
        self.next = self.next.wrapping_add(1).max(1);
        self.next
    }

    fn watch(&self, fd: impl AsFd, token: u64) {
        if let Err(error) = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN) {
            tracing::warn!(%error, "cannot be watched");
        }
    }

    /// Waits, at most so long, for processes and whatever wakes, and takes what processes have said.
    fn hear_local(&mut self, time: Duration) -> Result<bool, Error> {
        let mut found = [std::mem::MaybeUninit::uninit(); 64];
        let time = rustix::time::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let ready = match epoll::wait(&self.epoll, &mut found, Some(&time)) {
            Ok((ready, _)) => ready,
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(Error::io("waiting")(error.into())),
        };
        let tokens: Vec<u64> = ready.iter().map(|event| event.data.u64()).collect();
        let mut did = false;
        for token in tokens {
            match token {
                BELL => self.post.quiet(),
                // It is looked at in any case.
                DEVICE => {}
                DOOR => {
                    // The next poll reports the remaining new processes.
                    for _ in 0..LOCAL_TURN {
                        // A process may not use the descriptors of connections that have been offered.
                        let accepted = match self.used_descriptors() < self.descriptors {
                            true => self.door.accept(&self.about),
                            false => Err(Errno::MFILE),
                        };
                        let socket = match accepted {
                            Ok(socket) => socket,
                            Err(Errno::MFILE | Errno::NFILE) if self.refuse_at_door() => continue,
                            Err(_) => break,
                        };
                        let number = NUMBERS + u64::from(self.number());
                        self.watch(&socket, number);
                        self.clients.insert(number, socket);
                    }
                }
                number => {
                    did |= self.hear(number);
                }
            }
        }
        Ok(did)
    }

    /// Handles at most [`LOCAL_TURN`] messages of a process, so that a flood of them cannot starve the links and other processes.
    fn hear(&mut self, client: u64) -> bool {
        let mut did = false;
        for _ in 0..LOCAL_TURN {
            let Some(said) = self.clients.get(&client).and_then(local::hear) else { break };
            did = true;
            match said {
                Said::Wake => {}
                Said::Request(request, files) => self.request(client, &request, files),
                Said::Truncated(request) => {
                    if self.carried_for(client, &request).is_some_and(Carried::lack_descriptors) {
                        self.warn_of_limit("a connection is reset");
                    }
                }
                Said::Gone => {
                    self.clients.remove(&client);
                    self.wishes.retain(|_, wish| wish.client != client);
                    self.check_holders(|one| one.client == client);
                }
            }
        }
        did
    }

    /// A process's connection.
    fn carried_for(&mut self, client: u64, request: &Request) -> Option<&mut Carried> {
        let id = self.by_end.get(&end_of(request))?;
        self.carried.get_mut(id).filter(|one| one.client == client)
    }

    /// At the limit of open files, refuses a new process by means of the reserved descriptor. Otherwise the pending connection would wake this
    /// loop again and again. False if there is no new process.
    fn refuse_at_door(&mut self) -> bool {
        self.reserve = None;
        let has_refused = self.door.refuse();
        self.reserve = reserve();
        if has_refused {
            self.warn_of_limit("a process is turned away");
        }
        has_refused
    }

    /// Logs that the limit of open files is reached, each effect at most once in [`WARN_EVERY`].
    fn warn_of_limit(&mut self, effect: &'static str) {
        if self.warned.get(effect).is_none_or(|warned| warned.elapsed() >= WARN_EVERY) {
            self.warned.insert(effect, Instant::now());
            tracing::warn!("the limit of open files (ulimit -n) is reached: {effect}");
        }
    }

    fn request(&mut self, client: u64, request: &Request, files: [Option<OwnedFd>; 3]) {
        let end = end_of(request);
        let Some(service) = request.service else {
            match (self.carried_for(client, request), files) {
                (Some(one), [Some(tcp), waker, room]) => one.use_with(tcp, waker, room),
                (Some(one), [None, ..]) => one.decline(),
                (None, _) => self.wishes.retain(|other, wish| *other != end || wish.client != client),
            }
            return;
        };
        self.wishes.insert(end, Wish { client, key: request.key, service, since: Instant::now() });
        if request.is_higher {
            if let Some(find) = self.finds.remove(&end) {
                self.found(end, find.link, find.id, find.ring);
            }
            return;
        }
        let way = end.way();
        match self.ways.get(&way) {
            Some(WayState::Link(link)) => {
                let link = *link;
                self.ask(end, link);
            }
            Some(WayState::Calling) => {}
            Some(WayState::Failed(at)) if at.elapsed() < RETRY_AFTER => drop(self.wishes.remove(&end)),
            _ if self.ways.values().filter(|way| matches!(way, WayState::Calling)).count() >= CALLS_MAX => {
                self.wishes.remove(&end);
            }
            _ => {
                let is_called = calls::call(&self.host, way, self.config.port, &self.post);
                self.ways.insert(way, if is_called { WayState::Calling } else { WayState::Failed(Instant::now()) });
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Failed(way) => {
                self.ways.insert(way, WayState::Failed(Instant::now()));
                self.wishes.retain(|end, _| end.is_higher || end.way() != way);
            }
            Event::Met(link, called) if self.links_with(link.peer) >= LINKS_OF_ONE_MAX => {
                tracing::warn!(peer = %link.peer, "a relay wants more links than are of use");
                if let Some(way) = called {
                    self.take(Event::Failed(way));
                }
            }
            Event::Met(link, called) => {
                let number = NUMBERS + u64::from(self.number());
                let (peer, encrypted, by) = (link.peer, link.is_encrypted(), link.detail());
                tracing::info!(%peer, encrypted, by, "a link");
                let way = called.unwrap_or((link.local, link.peer));
                self.links.insert(number, *link);
                self.ways.entry(way).and_modify(|state| {
                    // Two that have called each other at once: each goes on with its own.
                    if called.is_some() || !matches!(state, WayState::Link(_) | WayState::Calling) {
                        *state = WayState::Link(number);
                    }
                });
                self.ways.entry(way).or_insert(WayState::Link(number));
                if matches!(self.ways.get(&way), Some(WayState::Link(link)) if *link == number) {
                    let waiting = self.wishes.keys().filter(|end| !end.is_higher && end.way() == way);
                    let waiting: Vec<End> = waiting.copied().collect();
                    waiting.into_iter().for_each(|end| self.ask(end, number));
                }
            }
        }
    }

    fn links_with(&self, peer: IpAddr) -> usize {
        self.links.values().filter(|link| link.peer == peer).count()
    }

    /// Asks another relay for the other end of a connection.
    fn ask(&mut self, end: End, link: u64) {
        let id = self.number();
        self.asked.insert(id, (end, link));
        let ring = self.config.ring as u32;
        self.send(link, &Message::Find { id, ring, addresses: end.addresses });
    }

    fn send(&mut self, link: u64, message: &Message<'_>) {
        if let Some(Err(error)) = self.links.get_mut(&link).map(|one| one.send(message)) {
            self.lose(link, &error);
        }
    }

    /// The other relay's process and one of this host have found each other: this one has the higher end.
    fn found(&mut self, end: End, link: u64, peer: u32, ring: u32) {
        let own = self.number();
        let ring = ring.min(self.config.ring as u32);
        if self.carry(end, link, (peer, own), ring) {
            self.send(link, &Message::Found { id: peer, own, ring });
        } else {
            self.send(link, &Message::Finish { id: peer });
        }
    }

    /// Hands a process a segment. False if that cannot be. The other relay knows the connection by the number `own`.
    fn carry(&mut self, end: End, link: u64, (peer, own): (u32, u32), ring: u32) -> bool {
        let Some(wish) = self.wishes.remove(&end) else { return false };
        let ring = ring as usize;
        let is_legal = ring.is_power_of_two() && (RING_MIN..=self.config.ring).contains(&ring);
        if self.by_end.contains_key(&end) || !is_legal {
            return false;
        }
        // The message in which the process declines may be lost, if this relay was stopped. The process withdraws its entry in any case.
        let entry = self.board.find(Key::from_bytes(&wish.key));
        let Some((ticket, _)) = entry.filter(|(_, listing)| listing.service == wish.service) else { return false };
        if !self.has_descriptors_for_one() {
            self.warn_of_limit("a connection stays with TCP");
            return false;
        }
        let offered = Segment::create(ring).and_then(|(segment, fd)| {
            local::offer(wish.service, wish.key, &fd).inspect_err(|_| {
                // SAFETY: nothing else knows it.
                unsafe { segment.unmap() };
            })?;
            Ok(segment)
        });
        let segment = match offered {
            Ok(segment) => segment,
            Err(error) => {
                tracing::info!(%error, "a process could not be handed a segment");
                return false;
            }
        };
        self.board.answer(ticket);
        let one = Carried::new(end, wish.client, link, peer, segment);
        self.carried.insert(own, one);
        self.by_end.insert(end, own);
        true
    }

    /// Whether the descriptors of another connection are available.
    fn has_descriptors_for_one(&self) -> bool {
        self.used_descriptors() + DESCRIPTORS_OF_ONE <= self.descriptors
    }

    /// Descriptors in use, and those that are promised to connections, links and calls.
    fn used_descriptors(&self) -> usize {
        let carried = self.carried.len() * DESCRIPTORS_OF_ONE;
        let calls = self.ways.values().filter(|way| matches!(way, WayState::Calling)).count();
        let links = (self.links.len() + calls) * DESCRIPTORS_OF_LINK;
        carried + self.closing.len() + links + self.clients.len()
    }

    fn hear_links(&mut self) -> bool {
        let mut did = false;
        let numbers: Vec<u64> = self.links.keys().copied().collect();
        for number in numbers {
            for _ in 0..TURN {
                match self.hear_link(number) {
                    Ok(true) => did = true,
                    Ok(false) => break,
                    Err(error) => {
                        self.lose(number, &error);
                        did = true;
                        break;
                    }
                }
            }
        }
        did
    }

    /// What this link's relay was asked for by this number. It is answered once.
    fn asked_by(&mut self, id: u32, link: u64) -> Option<End> {
        self.asked.get(&id).filter(|(_, asked)| *asked == link)?;
        self.asked.remove(&id).map(|(end, _)| end)
    }

    /// A message of another relay, if there is one.
    fn hear_link(&mut self, number: u64) -> Result<bool, Error> {
        let State { links, carried, .. } = self;
        let Some(link) = links.get_mut(&number) else { return Ok(false) };
        let way = (link.local, link.peer);
        let Some(message) = link.receive()? else { return Ok(false) };
        match message {
            Message::Update { id, update, bytes } => {
                // One that has gone meanwhile was ended by a message of this relay's.
                if let Some(one) = carried.get_mut(&id).filter(|one| one.link == number)
                    && one.apply(&update, bytes).is_err()
                {
                    self.end(id, Over::Lost);
                }
            }
            Message::Feedback { id, feedback } => {
                if let Some(one) = carried.get_mut(&id).filter(|one| one.link == number)
                    && one.receive(&feedback).is_err()
                {
                    self.end(id, Over::Lost);
                }
            }
            Message::Finish { id } => {
                if carried.get(&id).is_some_and(|one| one.link == number) {
                    self.end(id, Over::Finished);
                } else if let Some(end) = self.asked_by(id, number) {
                    self.wishes.remove(&end);
                }
            }
            Message::Found { id, own, ring } => {
                // The process that has asked may have gone meanwhile.
                let asked = self.asked_by(id, number);
                if !asked.is_some_and(|end| self.carry(end, number, (own, id), ring)) {
                    self.send(number, &Message::Finish { id: own });
                }
            }
            Message::Abort { id } => {
                if carried.get(&id).is_some_and(|one| one.link == number) {
                    self.end(id, Over::Lost);
                }
            }
            Message::Find { id, ring, addresses } => {
                let end = End { addresses, is_higher: true };
                // The other relay is believed for its own address alone.
                if end.way() != way {
                    return Err(lies());
                }
                if self.wishes.contains_key(&end) {
                    self.found(end, number, id, ring);
                } else if link.finds < FINDS_MAX {
                    link.finds += 1;
                    self.finds.insert(end, Find { link: number, id, ring, since: Instant::now() });
                }
            }
            Message::Ping => {}
        }
        Ok(true)
    }

    /// Moves what processes have done. True if there was anything.
    fn pump(&mut self, is_idle: bool) -> bool {
        let State { carried, links, clients, first, .. } = self;
        let mut did = false;
        let (mut over, mut broken) = (Vec::new(), Vec::new());
        // Begins with the first connection whose link had no room in the last turn, so that none starves.
        let begin = *first % carried.len().max(1);
        let mut without_room = None;
        for part in [begin..carried.len(), 0..begin] {
            for (at, (id, one)) in carried.iter_mut().enumerate().take(part.end).skip(part.start) {
                let Some(link) = links.get_mut(&one.link) else { continue };
                if !link.has_room() {
                    without_room.get_or_insert(at);
                }
                match one.pump(link, is_idle, clients.contains_key(&one.client)) {
                    Ok(Pumped::Nothing) => {}
                    Ok(Pumped::Some) => did = true,
                    Ok(Pumped::Over) => over.push((*id, Over::Finished)),
                    Err(Failed::Here) => over.push((*id, Over::Lost)),
                    Err(Failed::Link(error)) => broken.push((one.link, error)),
                }
                one.tell_news();
            }
        }
        *first = without_room.unwrap_or(0);
        did |= !over.is_empty() || !broken.is_empty();
        for (id, how) in over {
            let Some(one) = self.carried.get(&id) else { continue };
            let (link, peer) = (one.link, one.peer);
            self.end(id, how);
            if how == Over::Finished {
                self.send(link, &Message::Finish { id: peer });
            }
        }
        for (number, link) in &mut self.links {
            if let Err(error) = link.flush() {
                broken.push((*number, error));
            }
        }
        for (link, error) in broken {
            self.lose(link, &error);
        }
        did
    }

    /// A connection is carried no more.
    fn end(&mut self, id: u32, over: Over) {
        let Some(one) = self.carried.remove(&id) else { return };
        self.by_end.remove(&one.end);
        let (link, peer, other) = (one.link, one.peer, one.end.way().1);
        let (over, tcp) = one.end(over);
        if let Some(tcp) = tcp {
            self.closing.add(tcp);
        }
        if over == Over::Lost {
            tracing::warn!(peer = %other, "a connection is lost");
            self.send(link, &Message::Abort { id: peer });
        }
    }

    /// A link has ended, and with it everything that it carries.
    fn lose(&mut self, number: u64, error: &Error) {
        let Some(link) = self.links.remove(&number) else { return };
        tracing::warn!(peer = %link.peer, %error, "a link has ended");
        drop(link);
        self.ways.retain(|_, state| !matches!(state, WayState::Link(link) if *link == number));
        self.finds.retain(|_, find| find.link != number);
        self.asked.retain(|_, (_, link)| *link != number);
        let carried: Vec<u32> = self.carried.iter().filter(|(_, one)| one.link == number).map(|(id, _)| *id).collect();
        carried.into_iter().for_each(|id| self.end(id, Over::Lost));
    }

    fn ping(&mut self) {
        let idle: Vec<u64> = self
            .links
            .iter_mut()
            .filter_map(|(number, link)| (!std::mem::replace(&mut link.has_sent, false)).then_some(*number))
            .collect();
        idle.into_iter().for_each(|link| self.send(link, &Message::Ping));
    }

    /// Forgets what has waited too long.
    fn clean(&mut self, now: Instant) {
        self.wishes.retain(|end, wish| {
            let is_kept = now - wish.since < PATIENCE;
            if !is_kept {
                let peer = end.way().1;
                tracing::warn!(%peer, "no program there that has joined its relay has the other end of a connection: it stays with TCP");
            }
            is_kept
        });
        self.ways.retain(|_, state| !matches!(state, WayState::Failed(at) if now - *at > RETRY_AFTER));
        let wishes = &self.wishes;
        self.asked.retain(|_, (end, _)| wishes.contains_key(end));
        self.finds.retain(|_, find| now - find.since < PATIENCE);
        self.links.values_mut().for_each(|link| link.finds = 0);
        for find in self.finds.values() {
            if let Some(link) = self.links.get_mut(&find.link) {
                link.finds += 1;
            }
        }
        let clients: HashSet<u64> = self.clients.keys().copied().collect();
        self.wishes.retain(|_, wish| clients.contains(&wish.client));
        self.check_holders(|_| true);
    }

    /// Checks that processes have the connections that were returned.
    fn check_holders(&mut self, is_one: impl Fn(&Carried) -> bool) {
        let (mut diagnostics, mut sequence) = (None, 0);
        for one in self.carried.values_mut().filter(|one| is_one(one)) {
            let lives = self.clients.contains_key(&one.client);
            one.check_holder(lives, |interface, own, peer| {
                let socket = match diagnostics.take() {
                    Some(socket) => socket,
                    None => thruway_tcp::diagnostics()?,
                };
                sequence += 1;
                let socket = &*diagnostics.insert(socket);
                match interface {
                    Some(interface) => thruway_tcp::ask_on(socket, interface, sequence, own, peer),
                    None => thruway_tcp::ask(socket, sequence, own, peer),
                }
            });
        }
    }
}
