//! What a stranger sends to a rank or a launcher that listens: nobody without the secret gets in, and nothing is allocated for
//! what the stranger says.
#![no_main]

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use phalanx_collectives::secure::{self, Identity, Protection, Secret};

fuzz_target!(|bytes: &[u8]| {
    static LISTENER: OnceLock<TcpListener> = OnceLock::new();
    let listener = LISTENER.get_or_init(|| TcpListener::bind("127.0.0.1:0").unwrap());
    let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    let _ = stranger.write_all(bytes);
    let _ = stranger.shutdown(Shutdown::Write);
    let secret = Secret::from_bytes([7; 32]);
    let identity = Identity { job: [1; 16], epoch: 0, purpose: "data" };
    let deadline = Instant::now() + Duration::from_secs(1);
    assert!(secure::accept(socket, &secret, &identity, Protection::Encrypted, deadline).is_err());
});
